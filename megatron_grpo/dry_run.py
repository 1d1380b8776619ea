def dry_run_report(args, world_size): return ""
