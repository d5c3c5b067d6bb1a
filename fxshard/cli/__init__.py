"""The command line: inspect, plan, doctor, bench."""
