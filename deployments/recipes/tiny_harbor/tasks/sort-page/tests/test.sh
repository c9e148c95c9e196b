#!/bin/bash
reward=0
if cmp -s /app/page /tests/sorted; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
