#!/bin/bash
echo rice > list
