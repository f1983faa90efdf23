"""Which machines a run uses: where its workers are, what they tell of their hosts, and who is placed where."""
