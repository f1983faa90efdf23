#!/bin/bash
# Both figures are told; `reward` is the one that counts.
python3 -m unittest discover -s /tests -p 'check*.py' 2> /logs/verifier/output.txt && passed=1 || passed=0
[ -d /app/empty ] && [ -f /app/note ] && kept=1 || kept=0
echo "{\"reward\": $passed, \"kept\": $kept}" > /logs/verifier/reward.json
