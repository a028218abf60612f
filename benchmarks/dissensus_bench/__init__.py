"""Speed, measured beside what else one could use: the cases behind `dissensus bench`."""
