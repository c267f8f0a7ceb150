"""What runs inside a worker: the job, its steps, the engine, the data order, recovery."""
