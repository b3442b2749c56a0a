"""The side-by-side load test of capture proxies: `make bench-proxy`. See bench/README.md."""
