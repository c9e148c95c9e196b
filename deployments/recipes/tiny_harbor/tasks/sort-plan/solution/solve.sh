#!/bin/bash
sort save > plan
