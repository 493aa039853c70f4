"""Who goes on when members leave and join, and what a member that comes back must do first."""
