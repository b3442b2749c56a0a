#!/bin/sh
# Reward 1 if the function in answer.py passes the problem's tests. Without a verdict, 0 stands: it is written before
# and after.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
python3 -I /tests/check.py /workspace /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
