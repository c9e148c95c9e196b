#!/bin/bash
cp plan page
