"""How processes talk: frames between an agent and its workers, gRPC to the controller."""
