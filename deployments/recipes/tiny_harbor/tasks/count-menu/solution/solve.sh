#!/bin/bash
wc -l < list > menu
