"""Made-up lives of a rank, for the test that no order of events loses, mixes or leaks weights."""
