#!/bin/bash
cp menu save
