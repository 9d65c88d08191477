"""For plugin authors and our own tests: fakes, a virtual clock, fault injection, contract suites, numerics."""
