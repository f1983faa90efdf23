with open("/app/hello.txt") as file:
    assert file.read() == "Hello, harbor!\n"
