#!/bin/bash
reward=0
if [ "$(cat /app/plan)" = kiwi ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
