"""What every study is made of: arms with records, statistics, claims, tables, figures and pages; image sets and ImageNet folders."""
