#!/bin/bash
echo kiwi > plan
