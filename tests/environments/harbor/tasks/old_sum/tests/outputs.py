with open("/app/sum.txt") as file:
    assert int(file.read()) == 42
