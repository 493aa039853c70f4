"""The whole way: calibrate -> plan -> train -> export -> serve -> load test -> report."""
