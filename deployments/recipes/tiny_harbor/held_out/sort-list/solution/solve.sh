#!/bin/bash
sort menu > list
