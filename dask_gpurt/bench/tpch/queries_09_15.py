"""TPC-H queries 9 to 15, each as a dask.dataframe user would write it. See `tables` for the types."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

from dask_gpurt.bench.tpch.reference import q11_fraction
from dask_gpurt.bench.tpch.tables import Tables, decimal, keep, largest, mean, order_by, revenue, totals


def q09(t: Tables) -> Any:
    """Product type profit measure."""
    part = t.part[t.part.p_name.str.contains("green", regex=False)][["p_partkey"]]
    supplier = t.supplier[["s_suppkey", "s_nationkey"]].merge(
        t.nation[["n_nationkey", "n_name"]], left_on="s_nationkey", right_on="n_nationkey"
    )[["s_suppkey", "n_name"]]
    offers = t.partsupp[["ps_partkey", "ps_suppkey", "ps_supplycost"]].merge(
        part, left_on="ps_partkey", right_on="p_partkey"
    )
    li = t.lineitem.assign(volume=revenue(t.lineitem))
    li = li[["l_orderkey", "l_partkey", "l_suppkey", "l_quantity", "volume"]]
    li = li.merge(part, left_on="l_partkey", right_on="p_partkey").drop(columns="p_partkey")
    li = li.merge(offers, left_on=["l_partkey", "l_suppkey"], right_on=["ps_partkey", "ps_suppkey"])
    li = li.assign(amount=li.volume - decimal(li.ps_supplycost * li.l_quantity, 19, 4))
    li = li[["l_orderkey", "l_suppkey", "amount"]].merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    joined = li.merge(t.orders[["o_orderkey", "o_orderdate"]], left_on="l_orderkey", right_on="o_orderkey")
    joined = joined.assign(o_year=joined.o_orderdate.dt.year).rename(columns={"n_name": "nation"})
    out = joined.groupby(["nation", "o_year"]).agg(sum_profit=("amount", "sum")).reset_index()
    return order_by(out, ["nation", "o_year"], [True, False])


def q10(t: Tables) -> Any:
    """Returned item reporting."""
    orders = t.orders[(t.orders.o_orderdate >= date(1993, 10, 1)) & (t.orders.o_orderdate < date(1994, 1, 1))]
    li = t.lineitem[t.lineitem.l_returnflag == "R"]
    li = li.assign(revenue=revenue(li))[["l_orderkey", "revenue"]]
    joined = li.merge(orders[["o_orderkey", "o_custkey"]], left_on="l_orderkey", right_on="o_orderkey")
    # c_custkey is the key of customer: summing by it first leaves one narrow row a customer for the wide join.
    sums = joined.groupby("o_custkey").agg({"revenue": "sum"}).reset_index()
    customer = t.customer[["c_custkey", "c_name", "c_acctbal", "c_nationkey", "c_address", "c_phone", "c_comment"]]
    out = customer.merge(sums, left_on="c_custkey", right_on="o_custkey")
    out = out.merge(t.nation[["n_nationkey", "n_name"]], left_on="c_nationkey", right_on="n_nationkey")
    columns = ["c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment"]
    return order_by(out[columns], ["revenue"], False, 20)


def q11(t: Tables) -> Any:
    """Important stock identification."""
    nation = t.nation[t.nation.n_name == "GERMANY"][["n_nationkey"]]
    supplier = t.supplier[["s_suppkey", "s_nationkey"]].merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    offers = t.partsupp[["ps_partkey", "ps_suppkey", "ps_supplycost", "ps_availqty"]]
    offers = offers.merge(supplier[["s_suppkey"]], left_on="ps_suppkey", right_on="s_suppkey")
    offers = offers.assign(value=offers.ps_supplycost * offers.ps_availqty)
    out = offers.groupby("ps_partkey").agg(value=("value", "sum")).reset_index()
    out = keep(out, "value", "gt", totals(offers[["value"]]), q11_fraction(t.scale))
    return order_by(out, ["value"], False)


def q12(t: Tables) -> Any:
    """Shipping modes and order priority."""
    li = t.lineitem
    li = li[
        li.l_shipmode.isin(["MAIL", "SHIP"])
        & (li.l_commitdate < li.l_receiptdate)
        & (li.l_shipdate < li.l_commitdate)
        & (li.l_receiptdate >= date(1994, 1, 1))
        & (li.l_receiptdate < date(1995, 1, 1))
    ][["l_orderkey", "l_shipmode"]]
    joined = li.merge(t.orders[["o_orderkey", "o_orderpriority"]], left_on="l_orderkey", right_on="o_orderkey")
    high = joined.o_orderpriority.isin(["1-URGENT", "2-HIGH"])
    joined = joined.assign(high=high.astype("int64[pyarrow]"), low=(~high).astype("int64[pyarrow]"))
    out = joined.groupby("l_shipmode").agg(high_line_count=("high", "sum"), low_line_count=("low", "sum"))
    return order_by(out.reset_index(), ["l_shipmode"])


def q13(t: Tables) -> Any:
    """Customer distribution."""
    orders = t.orders[~t.orders.o_comment.str.contains("special.*requests", regex=True)]
    per_customer = orders.groupby("o_custkey").agg({"o_orderkey": "count"}).reset_index()
    per_customer = per_customer.rename(columns={"o_orderkey": "c_count"})
    customer = t.customer[["c_custkey"]].merge(per_customer, left_on="c_custkey", right_on="o_custkey", how="left")
    customer = customer.assign(c_count=customer.c_count.fillna(0).astype("int64[pyarrow]"))
    out = customer.groupby("c_count").agg(custdist=("c_custkey", "count")).reset_index()
    return order_by(out, ["custdist", "c_count"], [False, False])


def q14(t: Tables) -> Any:
    """Promotion effect."""
    li = t.lineitem[(t.lineitem.l_shipdate >= date(1995, 9, 1)) & (t.lineitem.l_shipdate < date(1995, 10, 1))]
    li = li.assign(revenue=revenue(li))[["l_partkey", "revenue"]]
    joined = li.merge(t.part[["p_partkey", "p_type"]], left_on="l_partkey", right_on="p_partkey")
    joined = joined.assign(promo=joined.revenue.where(joined.p_type.str.startswith("PROMO"), Decimal(0)))
    sums = totals(joined[["promo", "revenue"]])
    return sums.assign(promo_revenue=mean(sums.promo, sums.revenue) * 100)[["promo_revenue"]]


def q15(t: Tables) -> Any:
    """Top supplier."""
    li = t.lineitem[(t.lineitem.l_shipdate >= date(1996, 1, 1)) & (t.lineitem.l_shipdate < date(1996, 4, 1))]
    li = li.assign(revenue=revenue(li))
    sums = li.groupby("l_suppkey").agg({"revenue": "sum"}).reset_index().rename(columns={"revenue": "total_revenue"})
    best = keep(sums, "total_revenue", "eq", largest(sums[["total_revenue"]]))
    supplier = t.supplier[["s_suppkey", "s_name", "s_address", "s_phone"]]
    out = supplier.merge(best, left_on="s_suppkey", right_on="l_suppkey").drop(columns="l_suppkey")
    return order_by(out, ["s_suppkey"])
