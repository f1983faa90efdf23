#!/usr/bin/env python3
import os
import sys

amount = int(sys.argv[1])
found = []
for coin in map(int, os.environ["COINS"].split(",")):
    while amount > coin:
        amount -= coin
        found.append(coin)
print(*found)
