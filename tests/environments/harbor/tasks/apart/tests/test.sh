#!/bin/bash
# `expected.txt` is in this image alone; `notes.txt` and `draft.tmp` stay in the agent's.
ls -R /app /data /logs/artifacts
if [ "$(tr '\n' ' ' < /logs/artifacts/sorted.txt)" = "$(cat expected.txt) " ] && [ -s /app/squares.txt ] &&
  [ "$LAST" = 4 ] && [ -f /data/drafts/draft.txt ] && [ ! -e /data/drafts/draft.tmp ] && [ ! -e /app/notes.txt ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
