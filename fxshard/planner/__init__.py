"""What goes where: units, buckets, layouts, placements and the memory plan. Pure, deterministic, no communication."""
