#!/bin/bash
reward=0
if [ "$(tr -d " " < /app/menu)" = 3 ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
