"""Pipeline parallelism (axis ``pp``): each stage holds some of the layers; micro-batches pass through the stages."""
