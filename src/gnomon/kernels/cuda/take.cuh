// Steps of a graph begin by taking in what differs from step to step; nothing is needed for it.
