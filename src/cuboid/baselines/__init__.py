"""What the cuboid is compared with: one device, 1-D, 2-D and 2.5-D parallelism."""
