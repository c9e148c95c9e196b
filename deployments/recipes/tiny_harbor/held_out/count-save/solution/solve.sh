#!/bin/bash
wc -l < note > save
