"""Every task of a store as an HTTP service: `bitgraft serve`. docs/serving.md says how it behaves."""
