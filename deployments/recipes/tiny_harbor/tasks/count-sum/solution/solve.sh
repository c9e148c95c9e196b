#!/bin/bash
wc -l < page > sum
