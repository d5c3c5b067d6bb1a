"""From a scheduled graph to programs: segments, Inductor, instructions."""
