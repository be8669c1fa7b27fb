"""TPC-H queries 1 to 8, each as a dask.dataframe user would write it. See `tables` for the types."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

from dask_gpurt.bench.tpch.tables import Tables, decimal, mean, order_by, revenue, totals


def q01(t: Tables) -> Any:
    """Pricing summary report."""
    li = t.lineitem[t.lineitem.l_shipdate <= date(1998, 9, 2)]
    li = li.assign(disc_price=revenue(li), l_tax=decimal(1 + li.l_tax, 5, 2))
    li = li.assign(charge=li.disc_price * li.l_tax)
    out = (
        li.groupby(["l_returnflag", "l_linestatus"])
        .agg(
            sum_qty=("l_quantity", "sum"),
            sum_base_price=("l_extendedprice", "sum"),
            sum_disc_price=("disc_price", "sum"),
            sum_charge=("charge", "sum"),
            sum_disc=("l_discount", "sum"),
            count_order=("l_quantity", "count"),
        )
        .reset_index()
    )
    out = out.assign(
        avg_qty=mean(out.sum_qty, out.count_order),
        avg_price=mean(out.sum_base_price, out.count_order),
        avg_disc=mean(out.sum_disc, out.count_order),
    )
    keys = ["l_returnflag", "l_linestatus"]
    sums = ["sum_qty", "sum_base_price", "sum_disc_price", "sum_charge"]
    return order_by(out[[*keys, *sums, "avg_qty", "avg_price", "avg_disc", "count_order"]], keys)


def q02(t: Tables) -> Any:
    """Minimum cost supplier."""
    region = t.region[t.region.r_name == "EUROPE"]
    nation = t.nation.merge(region, left_on="n_regionkey", right_on="r_regionkey")[["n_nationkey", "n_name"]]
    supplier = t.supplier.merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    part = t.part[(t.part.p_size == 15) & t.part.p_type.str.endswith("BRASS")][["p_partkey", "p_mfgr"]]
    offers = t.partsupp[["ps_partkey", "ps_suppkey", "ps_supplycost"]]
    offers = offers.merge(part, left_on="ps_partkey", right_on="p_partkey")
    offers = offers.merge(supplier, left_on="ps_suppkey", right_on="s_suppkey")
    lowest = offers.groupby("p_partkey").agg({"ps_supplycost": "min"}).reset_index()
    lowest = lowest.rename(columns={"ps_supplycost": "lowest"})
    best = offers.merge(lowest, on="p_partkey")
    best = best[best.ps_supplycost == best.lowest]
    columns = ["s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment"]
    return order_by(best[columns], ["s_acctbal", "n_name", "s_name", "p_partkey"], [False, True, True, True], 100)


def q03(t: Tables) -> Any:
    """Shipping priority."""
    day = date(1995, 3, 15)
    customer = t.customer[t.customer.c_mktsegment == "BUILDING"][["c_custkey"]]
    orders = t.orders[t.orders.o_orderdate < day][["o_orderkey", "o_custkey", "o_orderdate", "o_shippriority"]]
    li = t.lineitem[t.lineitem.l_shipdate > day]
    li = li.assign(revenue=revenue(li))[["l_orderkey", "revenue"]]
    orders = orders.merge(customer, left_on="o_custkey", right_on="c_custkey")
    joined = li.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    keys = ["l_orderkey", "o_orderdate", "o_shippriority"]
    out = joined.groupby(keys).agg(revenue=("revenue", "sum")).reset_index()
    out = out[["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]]
    return order_by(out, ["revenue", "o_orderdate"], [False, True], 10)


def q04(t: Tables) -> Any:
    """Order priority checking."""
    orders = t.orders[(t.orders.o_orderdate >= date(1993, 7, 1)) & (t.orders.o_orderdate < date(1993, 10, 1))]
    late = t.lineitem[t.lineitem.l_commitdate < t.lineitem.l_receiptdate][["l_orderkey"]]
    orders = orders[["o_orderkey", "o_orderpriority"]].merge(
        late, left_on="o_orderkey", right_on="l_orderkey", how="leftsemi"
    )
    out = orders.groupby("o_orderpriority").agg(order_count=("o_orderkey", "count")).reset_index()
    return order_by(out, ["o_orderpriority"])


def q05(t: Tables) -> Any:
    """Local supplier volume."""
    region = t.region[t.region.r_name == "ASIA"]
    nation = t.nation.merge(region, left_on="n_regionkey", right_on="r_regionkey")[["n_nationkey", "n_name"]]
    supplier = t.supplier[["s_suppkey", "s_nationkey"]].merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    supplier = supplier[["s_suppkey", "s_nationkey", "n_name"]]
    orders = t.orders[(t.orders.o_orderdate >= date(1994, 1, 1)) & (t.orders.o_orderdate < date(1995, 1, 1))]
    orders = orders[["o_orderkey", "o_custkey"]].merge(
        t.customer[["c_custkey", "c_nationkey"]], left_on="o_custkey", right_on="c_custkey"
    )[["o_orderkey", "c_nationkey"]]
    li = t.lineitem.assign(revenue=revenue(t.lineitem))[["l_orderkey", "l_suppkey", "revenue"]]
    # Suppliers first: their join needs no shuffle and leaves a fifth of the lines for the one that does.
    li = li.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")[
        ["l_orderkey", "s_nationkey", "n_name", "revenue"]
    ]
    joined = li.merge(orders, left_on=["l_orderkey", "s_nationkey"], right_on=["o_orderkey", "c_nationkey"])
    out = joined.groupby("n_name").agg(revenue=("revenue", "sum")).reset_index()
    return order_by(out, ["revenue"], False)


def q06(t: Tables) -> Any:
    """Forecasting revenue change."""
    li = t.lineitem
    li = li[
        (li.l_shipdate >= date(1994, 1, 1))
        & (li.l_shipdate < date(1995, 1, 1))
        & (li.l_discount >= Decimal("0.05"))
        & (li.l_discount <= Decimal("0.07"))
        & (li.l_quantity < 24)
    ]
    return totals(li.assign(revenue=li.l_extendedprice * li.l_discount)[["revenue"]])


def q07(t: Tables) -> Any:
    """Volume shipping."""
    pair = ["FRANCE", "GERMANY"]
    nation = t.nation[t.nation.n_name.isin(pair)][["n_nationkey", "n_name"]]
    supplier = t.supplier[["s_suppkey", "s_nationkey"]].merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    supplier = supplier.rename(columns={"n_name": "supp_nation"})[["s_suppkey", "supp_nation"]]
    customer = t.customer[["c_custkey", "c_nationkey"]].merge(nation, left_on="c_nationkey", right_on="n_nationkey")
    customer = customer.rename(columns={"n_name": "cust_nation"})[["c_custkey", "cust_nation"]]
    orders = t.orders[["o_orderkey", "o_custkey"]].merge(customer, left_on="o_custkey", right_on="c_custkey")
    orders = orders[["o_orderkey", "cust_nation"]]
    li = t.lineitem[(t.lineitem.l_shipdate >= date(1995, 1, 1)) & (t.lineitem.l_shipdate <= date(1996, 12, 31))]
    li = li.assign(volume=revenue(li), l_year=li.l_shipdate.dt.year)[["l_orderkey", "l_suppkey", "l_year", "volume"]]
    # Suppliers first: they are few, so their join needs no shuffle and leaves 2 of 25 nations' lines.
    li = li.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    joined = li.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    joined = joined[joined.supp_nation != joined.cust_nation]
    keys = ["supp_nation", "cust_nation", "l_year"]
    return order_by(joined.groupby(keys).agg(revenue=("volume", "sum")).reset_index(), keys)


def q08(t: Tables) -> Any:
    """National market share."""
    region = t.region[t.region.r_name == "AMERICA"]
    nation = t.nation.merge(region, left_on="n_regionkey", right_on="r_regionkey")[["n_nationkey"]]
    customer = t.customer[["c_custkey", "c_nationkey"]].merge(nation, left_on="c_nationkey", right_on="n_nationkey")
    orders = t.orders[(t.orders.o_orderdate >= date(1995, 1, 1)) & (t.orders.o_orderdate <= date(1996, 12, 31))]
    orders = orders[["o_orderkey", "o_custkey", "o_orderdate"]].merge(
        customer[["c_custkey"]], left_on="o_custkey", right_on="c_custkey"
    )
    part = t.part[t.part.p_type == "ECONOMY ANODIZED STEEL"][["p_partkey"]]
    origin = t.nation[["n_nationkey", "n_name"]]
    supplier = t.supplier[["s_suppkey", "s_nationkey"]].merge(origin, left_on="s_nationkey", right_on="n_nationkey")
    li = t.lineitem.assign(volume=revenue(t.lineitem))[["l_orderkey", "l_partkey", "l_suppkey", "volume"]]
    li = li.merge(part, left_on="l_partkey", right_on="p_partkey")
    li = li.merge(supplier[["s_suppkey", "n_name"]], left_on="l_suppkey", right_on="s_suppkey")
    joined = li.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    joined = joined.assign(
        o_year=joined.o_orderdate.dt.year,
        brazil=joined.volume.where(joined.n_name == "BRAZIL", Decimal(0)),
    )
    out = joined.groupby("o_year").agg(brazil=("brazil", "sum"), volume=("volume", "sum")).reset_index()
    out = out.assign(mkt_share=mean(out.brazil, out.volume))
    return order_by(out[["o_year", "mkt_share"]], ["o_year"])
