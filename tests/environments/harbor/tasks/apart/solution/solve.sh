#!/bin/bash
mkdir -p /data/drafts
touch notes.txt /data/drafts/draft.txt /data/drafts/draft.tmp
for number in $(seq "$LAST" -1 1); do echo $((number * number)); done > squares.txt
