#!/bin/bash
reward=0
if cmp -s /app/save /tests/menu; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
