"""The processes of a run: controller, agent, zygote, worker; and the handle its owner holds."""
