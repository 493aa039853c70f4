"""When replicas that train apart exchange what they learned, and how much of it at a time."""
