"""The planner against tables of published measurements, and the tables it is fitted on."""
