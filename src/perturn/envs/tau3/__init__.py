"""Environment `tau3`: customer-service tasks with a simulated user and tools that change a database."""
