"""What runs: arena, streams, buckets in memory, and the programs that drive them. Nothing here decides."""
