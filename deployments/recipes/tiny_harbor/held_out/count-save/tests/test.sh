#!/bin/bash
reward=0
if [ "$(tr -d " " < /app/save)" = 4 ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
