#!/bin/bash
reward=0
if cmp -s /app/note /tests/list; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
