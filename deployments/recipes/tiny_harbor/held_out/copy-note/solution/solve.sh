#!/bin/bash
cp list note
