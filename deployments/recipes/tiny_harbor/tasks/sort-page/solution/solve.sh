#!/bin/bash
sort note > page
