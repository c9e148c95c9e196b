#!/bin/bash
echo plum > note
