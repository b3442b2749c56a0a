#!/bin/sh
# Reward 1 if the function in answer.py passes the problem's tests. The 0 stands first: whoever ends the check keeps it.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
python3 -I /tests/check.py /workspace /logs/verifier/reward.txt
