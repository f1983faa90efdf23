s/amount > coin/amount >= coin/
