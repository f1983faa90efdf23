#!/bin/bash
said=$(echo "quiet please" | "$HOME/.local/bin/shout")
if [ "$said" = "QUIET PLEASE" ] && [ "$(readlink /data/shout)" = "$HOME/.local/bin/shout" ]; then
  echo 1.0
else
  echo 0.0
fi > /logs/verifier/reward.txt
