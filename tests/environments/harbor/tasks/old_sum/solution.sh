#!/bin/bash
paste -sd+ numbers.txt | awk -F+ '{ for (i = 1; i <= NF; i++) sum += $i; print sum }' > sum.txt
