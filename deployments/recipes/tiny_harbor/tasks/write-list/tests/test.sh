#!/bin/bash
reward=0
if [ "$(cat /app/list)" = rice ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
