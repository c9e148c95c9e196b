#!/bin/bash
reward=0
if [ "$(cat /app/note)" = plum ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
